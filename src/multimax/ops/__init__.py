"""The operations, each in its own folder: rows, attention, loss and entmax; and what they share."""
