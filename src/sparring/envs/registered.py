"""Import this, and gymnasium knows the built-in tasks.

`gymnasium.make("sparring.envs.registered:sparring/lift_d0")` imports it by itself. It is the one module that does
something when imported: gymnasium has no other way to find the envs of a package.
"""

from sparring.envs.registration import register

register()
