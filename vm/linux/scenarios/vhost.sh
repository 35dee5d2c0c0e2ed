# title: `run --link vhost`: transfers both ways over the kernel's vhost-net
# set: name
# machine: linux
# limit: 60

plan 6
load vhost_net
outside
echo 0 2147483647 >/proc/sys/net/ipv4/ping_group_range
ringfence run --switch none --link tap -p 7001:7001 -- traffic receive 7001 >/tmp/sum3 &
GUEST=$!
wait_for 5 listens 7001
sleep 2
over_there timeout 10 traffic send 10.78.0.1 7001 4
ps
cat /proc/net/tcp
kill $GUEST
ringfence run --switch none --link vhost -p 7001:7001 -- traffic receive 7001 >/tmp/sum2 &
GUEST=$!
wait_for 5 listens 7001
sleep 2
over_there timeout 10 traffic send 10.78.0.1 7001 4
kill $GUEST
is 'a guest receives' "$(cat /tmp/sum2 /tmp/sum3)" "$(traffic sum 4)"
check 'a guest pings outside' ringfence run --switch none --link vhost -v -- ping -c 2 -W 5 10.78.0.2
