"""Regular expressions, grammars, choices and structural tags as one grammar in llguidance's Lark."""
