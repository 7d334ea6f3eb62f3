"""How many experts should stay on the GPU, and what does each further one save?"""
