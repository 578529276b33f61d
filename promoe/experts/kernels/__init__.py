"""What multiplies the rows of a group of experts."""
