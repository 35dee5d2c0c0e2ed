# sh scenario.sh NAME: runs one scenario, with all that it may use.

set -u
SCENARIO=$1
. /vm/orders
. /vm/lib/both.sh
. /vm/lib/checks.sh
. /vm/$SUITE/lib.sh
. /vm/$SUITE/scenarios/$1.sh
