#!/bin/sh
# Adapts the kernel's network tests below the folder $1 to an emulated computer and an interface without hardware.
cd $1 || exit 1
# A remote command alone can take the five seconds that it has, and traffic needs longer than those to get going, to a
# tenth of the rate.
sed -i 's/timeout=5)/timeout=60)/; s/deadline=5)/deadline=60)/' net/lib/py/utils.py
sed -i 's/range(50)/range(500)/; s/pps=1000/pps=100/' drivers/net/lib/py/load.py
# The number of packets that show which queue they go to.
sed -i 's/20000/2000/; s/stop(5000)/stop(500)/' drivers/net/hw/rss_ctx.py
# The library fails where an interface has no coalescing of interrupts to ask for.
sed -i 's/data = ethtool("-c .*/data = {}/' drivers/net/lib/py/env.py
