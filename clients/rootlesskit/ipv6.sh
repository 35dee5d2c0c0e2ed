# title: IPv6
# limit: 60

case $($CLIENT --version) in
    *' 2.'*)
        skip 'it has an address' 'this version has --ipv6 for slirp4netns only'
        skip 'a server outside is reached' 'this version has --ipv6 for slirp4netns only'
        complete_scenario
        exit 0
        ;;
esac
is 'it has an address' "$(kit --ipv6 ip -o -6 address show tap0 | grep -o 'fd00::100/64')" fd00::100/64
is 'a server outside is reached' "$(kit --ipv6 $peer tcp 2001:db8:ffff::1 7000 2000000)" 'client 2001:db8:1::2'
complete_scenario
