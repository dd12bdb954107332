"""Other engines beside ours: scripts that their own environments run, and the table of all of them."""
