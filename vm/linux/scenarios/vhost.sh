# title: `run --link vhost`: TCP, UDP, ping, many connections; the kernel's worker loses its backend under load
# set: core
# machine: linux
# limit: 60

. /vm/linux/vhost.sh
load vhost_net
check 'vhost-net has its device' test -c /dev/vhost-net || give_up 'nothing to drive'
check 'the worker says when it is told of memory it may not use' engines vhost
outside
check 'outside answers' ping -c 1 -W 5 10.78.0.2 || give_up 'no network'
# A guest's echo requests go out by sockets that this allows.
echo 0 2147483647 >/proc/sys/net/ipv4/ping_group_range
over_there traffic echo 7003 &
over_there traffic return 7004 &
check 'a guest pings outside' over vhost 65520 ping -c 2 -W 5 10.78.0.2
check 'a hundred connections at a time' over vhost 65520 traffic many 10.78.0.2 7003 100 32
check 'datagrams of every length' over vhost 65520 traffic datagrams 10.78.0.2 7004 100
for mtu in 65520 1500; do
    sends vhost $mtu 24
    is_sent_to vhost $mtu 24
done
# What the worker reaches is what is under way.
OPTIONS='--protect fine'
for mtu in 65520 1500; do
    sends vhost $mtu 24
    is_sent_to vhost $mtu 24
done
OPTIONS=
cut_off 'its interface is deleted' remove_interface
cut_off 'its process is killed' kill_uplink
# And the next one is as good as new.
sends vhost 65520 8
complete
