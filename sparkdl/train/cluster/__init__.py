"""Where in Spark a fit lives: seats, executors, what it holds there and how that is given back."""
