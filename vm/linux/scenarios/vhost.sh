# title: `run --link vhost`: TCP, UDP, ping, many connections; the kernel's worker loses its backend under load
# set: core
# machine: linux
# limit: 60

. /vm/linux/vhost.sh
load_modules vhost_net
check 'vhost-net has its device' test -c /dev/vhost-net || give_up 'nothing to drive'
check 'the worker says when it is told of memory it may not use' engines vhost
create_outside
check 'outside answers' ping -c 1 -W 5 10.78.0.2 || give_up 'no network'
# A guest's echo requests go out by sockets that this allows.
echo 0 2147483647 >/proc/sys/net/ipv4/ping_group_range
outside traffic echo 7003 &
outside traffic return 7004 &
check 'a guest pings outside' run_guest '' 65520 ping -c 2 -W 5 10.78.0.2
check 'a hundred connections at a time' run_guest '' 65520 traffic many 10.78.0.2 7003 100 32
check 'datagrams of every length' run_guest '' 65520 traffic datagrams 10.78.0.2 7004 100
for mtu in 65520 1500; do
    check_sending '' $mtu 24
    check_receiving '' $mtu 24
done
# The worker can access only the buffers that are in flight.
for mtu in 65520 1500; do
    check_sending '--protect fine' $mtu 24
    check_receiving '--protect fine' $mtu 24
done
check_link_loss 'its interface is deleted' remove_interface
check_link_loss 'its process is killed' kill_uplink
# And the next one is as good as new.
check_sending '' 65520 8
complete_scenario
