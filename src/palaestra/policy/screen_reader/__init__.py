"""A vision-language model that reads: a character detector, and a language model that gets what it detected."""
