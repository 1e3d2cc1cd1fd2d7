from .robot import Robot as Robot
