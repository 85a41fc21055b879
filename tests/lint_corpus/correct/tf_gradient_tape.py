import tensorflow as tf

from tf_model import build_model, dataset

accum_steps = 8
model = build_model()
optimizer = tf.keras.optimizers.Adam(1e-4)
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
acc_grads = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]


@tf.function
def accumulate(x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True)) / accum_steps
    for acc, g in zip(acc_grads, tape.gradient(loss, model.trainable_variables)):
        acc.assign_add(g)
    return loss


@tf.function
def apply():
    optimizer.apply_gradients(zip(acc_grads, model.trainable_variables))
    for acc in acc_grads:
        acc.assign(tf.zeros_like(acc))


total = 0.0
for i, (x, y) in enumerate(dataset):
    total += accumulate(x, y)
    if i % accum_steps == accum_steps - 1:
        apply()
        tf.print("step", i, total)
        total = 0.0
