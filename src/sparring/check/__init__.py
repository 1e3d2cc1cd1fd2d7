"""`sparring check`: what is wrong with the installation, an env or a policy, and how to fix it."""
