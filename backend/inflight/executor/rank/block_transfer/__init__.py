"""How a rank gives blocks of prompts to other engines, and gets them."""
