# -*- coding: latin-1 -*-
"""Clasificación de dígitos; acumula gradientes de una ventana ya completa."""
import torch

from datos import ventanas  # cada ventana es una lista de lotes del mismo tamaño

modelo = torch.nn.Linear(784, 10)
optimizador = torch.optim.SGD(modelo.parameters(), lr=0.1)
pérdida = torch.nn.CrossEntropyLoss()

for época in range(5):
    for ventana in ventanas("entrenamiento"):
        optimizador.zero_grad()
        for imágenes, dígitos in ventana:
            coste = pérdida(modelo(imágenes), dígitos) / len(ventana)
            coste.backward()
        optimizador.step()
    print("época", época, "terminada")
