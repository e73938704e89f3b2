"""nn.Module shells for kernelize (the models branch brings them)."""
