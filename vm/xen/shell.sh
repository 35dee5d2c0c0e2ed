# What an interactive shell in dom0 starts with.
. /vm/orders
. /vm/lib/both.sh
. /vm/lib/checks.sh
RESULTS=/dev/null
. /vm/xen/lib.sh
echo "The helpers of scenarios are loaded (guest, guest_ready, on, transfer, ...); /share is outside."
