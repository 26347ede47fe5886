"""The server: whole and running, with a plain function in the place of the model."""
