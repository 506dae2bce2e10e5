"""What people ask of a zoo: selection, lineage, differences, model cards."""
