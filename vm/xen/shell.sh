# Start of an interactive shell in dom0.
. /vm/orders
. /vm/lib/both.sh
. /vm/lib/checks.sh
RESULTS=/dev/null
. /vm/xen/lib.sh
echo "The helpers of scenarios are loaded (create_guest, guest_ready, on, check_transfer, ...); /share is outside."
