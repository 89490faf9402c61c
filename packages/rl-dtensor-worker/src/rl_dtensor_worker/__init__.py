"""A policy worker on FSDP2 and DTensor."""
