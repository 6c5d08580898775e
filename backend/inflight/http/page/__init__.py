"""The page at /: `index.html`, one static file, and the events that its picture of the live batch is made of."""
