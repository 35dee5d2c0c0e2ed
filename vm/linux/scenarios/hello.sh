# title: a plain Debian kernel runs `ringfence run`, and has the devices that other scenarios need
# set: core
# machine: linux
# limit: 40

check 'ringfence runs' ringfence --version
load_modules vhost_net nbd
check 'vhost-net has its device' test -c /dev/vhost-net
check 'nbd has its devices' test -b /dev/nbd0
check 'ringfence run gives its command a network' ringfence run --uplink none -- ip address show eth0
complete_scenario
