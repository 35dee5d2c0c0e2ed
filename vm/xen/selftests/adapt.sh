#!/bin/sh
# Adapts the kernel's network tests below the folder $1 to an emulated computer and an interface without hardware.
cd $1 || exit 1
# A remote command alone can take the five seconds that it has, and traffic needs longer than those to get going, to a
# tenth of the rate.
sed -i 's/timeout=5)/timeout=60)/; s/deadline=5)/deadline=60)/' net/lib/py/utils.py
sed -i 's/range(50)/range(500)/; s/pps=1000/pps=100/; s/timeout=5)/timeout=60)/' drivers/net/lib/py/load.py
# A tenth of the packets shows as well which queues they go to.
sed -i 's/\b\([0-9]*[057]00\)0\b/\1/; s/\b3500\b/350/' drivers/net/hw/rss_ctx.py
sed -i 's/total_seconds(), 0.2)/total_seconds(), 10)/' drivers/net/hw/rss_ctx.py
# The library fails where an interface has no coalescing of interrupts to ask for.
sed -i 's/data = ethtool("-c .*/data = {}/' drivers/net/lib/py/env.py
