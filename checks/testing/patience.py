"""How long tests wait: every wait of a test is one of these, generous on a busy machine."""
