"""What sender and receivers say to each other: messages, channels, waits, and the commit protocol.

Read `transaction` first: it has the order of the messages and the states of a receiver.
"""
