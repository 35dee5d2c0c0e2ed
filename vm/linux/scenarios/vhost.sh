# title: `run --link vhost`: transfers both ways over the kernel's vhost-net
# set: name
# machine: linux
# limit: 90

plan 7
load vhost_net
check 'vhost-net has its device' test -c /dev/vhost-net || give_up 'nothing to drive'
outside
check 'outside answers' ping -c 1 -W 5 10.78.0.2 || give_up 'no network'
# A guest's echo requests go out by sockets that this allows.
echo 0 2147483647 >/proc/sys/net/ipv4/ping_group_range
check 'a guest pings outside' ringfence run --switch none --link vhost -- ping -c 2 -W 5 10.78.0.2
over_there sh -c 'traffic receive 7000 >/tmp/sum.out' &
RECEIVER=$!
check 'a guest sends' ringfence run --switch none --link vhost -- traffic send 10.78.0.2 7000 32
kill $RECEIVER 2>/dev/null
is 'all of it arrived' "$(cat /tmp/sum.out)" "$(traffic sum 32)"
# As a guest may be late to listen, the sender tries again.
ringfence run --switch none --link vhost -p 7001:7001 -- timeout 60 traffic receive 7001 >/tmp/sum.in &
GUEST=$!
check 'a guest is sent to' wait_for 10 over_there timeout 20 traffic send 10.78.0.1 7001 32
wait_for 5 test -s /tmp/sum.in
kill $GUEST 2>/dev/null
is 'all of it arrived there' "$(cat /tmp/sum.in)" "$(traffic sum 32)"
