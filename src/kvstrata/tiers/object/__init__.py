"""The object tier: chunks as objects of any store that obstore speaks to."""
