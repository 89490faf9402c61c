"""What a worker is held to, one function a rule."""
