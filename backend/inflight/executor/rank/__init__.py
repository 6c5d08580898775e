"""One rank: a program that joins the other ranks, loads the model and runs GptManager on the leader's broadcasts."""
