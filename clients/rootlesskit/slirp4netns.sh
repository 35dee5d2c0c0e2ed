# title: the network of slirp4netns, with the port driver `slirp4netns`
# net: slirp4netns
# limit: 60

check 'it starts' start --port-driver=slirp4netns --disable-host-loopback --publish 0.0.0.0:8080:80/tcp --publish 0.0.0.0:8080:80/udp \
    $peer serve 0.0.0.0 80 || give_up "$(tail -n 3 kit.log)"
check 'TCP from outside' outside tcp 192.0.2.2 8080
check 'UDP from outside' outside udp 192.0.2.2 8080
check 'it ends' stop
is 'a server outside is reached' "$(kit --disable-host-loopback $peer tcp 198.51.100.1 7000 2000000)" 'client 192.0.2.2'
complete_scenario
