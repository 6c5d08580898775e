"""One rank: the program that joins the others, loads the model and runs GptManager on what the leader broadcasts."""
