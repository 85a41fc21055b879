import torch
from torch.optim import LBFGS


def run_style_transfer(model, style_losses, content_losses, input_img, num_steps=300, style_weight=1e6):
    """Change the image until its features are those of content and style. The closure clears its own gradients."""
    input_img.requires_grad_(True)
    model.requires_grad_(False)
    optimizer = LBFGS([input_img])
    run = [0]
    while run[0] <= num_steps:

        def closure():
            with torch.no_grad():
                input_img.clamp_(0, 1)
            optimizer.zero_grad()
            model(input_img)
            style_score = 0
            content_score = 0
            for sl in style_losses:
                style_score += sl.loss
            for cl in content_losses:
                content_score += cl.loss
            loss = style_score * style_weight + content_score
            loss.backward()
            run[0] += 1
            if run[0] % 50 == 0:
                print(f"run {run[0]}: style {style_score.item():4f} content {content_score.item():4f}")
            return loss

        optimizer.step(closure)
    return input_img.detach().clamp_(0, 1)
