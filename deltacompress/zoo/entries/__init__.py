"""What can be in a zoo: artifacts, adapters, bases, and the reports and signatures attached to them."""
