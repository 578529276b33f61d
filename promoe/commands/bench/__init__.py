"""`promoe bench`: this library, the unmodified model and what people use today, side by side at equal memory."""
