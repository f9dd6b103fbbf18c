import skyfab as sky
