"""`bench frontier`: what methods keep of real pairs at every size, in one table and one picture."""
