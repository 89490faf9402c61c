"""The halves of one refit, a receiver's session, and who a sender counts on."""
