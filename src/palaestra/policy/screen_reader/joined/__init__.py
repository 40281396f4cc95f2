"""A pretrained language model behind the vision tower: its tokens of a screen, and its training on synthetic pages."""
