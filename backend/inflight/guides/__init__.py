"""What requests ask their output to follow, translated to grammars that enforce exactly that, or refused by name."""
