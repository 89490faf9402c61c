"""What the sessions of the noxfile compute: plain modules, with tests of their own."""
