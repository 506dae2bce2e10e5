"""`analyze --predict`: what KL every size would have, as a table, a file and a picture."""
