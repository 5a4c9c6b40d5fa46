"""The operations, a room for each: rows, attention, loss and entmax; and what they share."""
