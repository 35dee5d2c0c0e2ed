use super::super::parse;
use super::*;
use ringfence_hostnet::netlink::Route;
use ringfence_uplink_process::upstream::NAME_SERVERS;

fn host() -> HostNetwork {
    let route = |destination: &str, prefix, gateway: &str| Route {
        destination: destination.parse().unwrap(),
        prefix,
        gateway: Some(gateway.parse().unwrap()),
        metric: None,
    };
    HostNetwork {
        interfaces: vec!["eth0".into()],
        addresses: ["192.0.2.7/24", "192.0.2.8/24", "2001:db8::7/64"]
            .map(|a| a.parse().unwrap())
            .into(),
        routes: vec![
            route("0.0.0.0", 0, "192.0.2.1"),
            route("198.51.100.0", 24, "192.0.2.9"),
            route("::", 0, "2001:db8::1"),
        ],
        links: Default::default(),
    }
}

fn resolver() -> Resolver {
    let name_servers = ["127.0.0.53", "2001:db8::53"].map(|ip| ip.parse().unwrap()).into();
    Resolver { name_servers, search: vec!["example".into()], ..Resolver::default() }
}

fn of(line: &str, host: HostNetwork) -> anyhow::Result<(PastaArgs, PlannedNetwork)> {
    let words: Vec<_> = line.split_whitespace().map(std::ffi::OsString::from).collect();
    let args = parse(&words).unwrap();
    PlannedNetwork::of(&args, host, resolver()).map(|network| (args, network))
}

fn config(line: &str) -> UplinkConfig {
    let (args, network) = of(line, host()).unwrap();
    network.config(&args, LinkOrder::Tap, 0, Vec::new(), None)
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn host_network_is_copied_without_options() {
    let (_, network) = of("", host()).unwrap();
    assert_eq!((network.interface.as_str(), network.plan.addresses.len()), ("eth0", 3));
    assert_eq!(network.plan.routes.len(), 3);
    assert_eq!(network.plan.gateways, [ip("192.0.2.1"), ip("2001:db8::1")]);
}

#[test]
fn namespace_that_configures_itself_may_choose_its_ipv6_address() {
    assert!(config("").chooses_address);
    assert!(!config("--config-net").chooses_address);
}

#[test]
fn given_address_replaces_those_of_its_family() {
    let config = config("-a 10.0.2.100 -n 24 -g 10.0.2.2");
    let addresses: Vec<String> = config.addresses.iter().map(Address::to_string).collect();
    assert_eq!(addresses, ["10.0.2.100/24", "2001:db8::7/64"]);
    assert_eq!(config.gateways, [ip("10.0.2.2"), ip("2001:db8::1")]);
}

#[test]
fn prefix_length_comes_from_address_netmask_host_or_class() {
    let first = |line: &str| config(line).addresses[0].to_string();
    assert_eq!(first("-4 -a 192.0.2.8"), "192.0.2.8/24");
    assert_eq!(first("-4 -a 10.0.0.1"), "10.0.0.1/8");
    assert_eq!(first("-4 -a 172.16.0.1/12"), "172.16.0.1/12");
    assert_eq!(first("-6 -a fd00::100"), "fd00::100/64");
    assert!(of("-a 10.0.0.1/8 -n 24", host()).is_err());
}

#[test]
fn namespace_gets_link_local_network_if_host_has_none() {
    let (_, network) = of("", HostNetwork::default()).unwrap();
    assert_eq!(network.interface, "tap0");
    assert_eq!(network.plan.addresses, ["169.254.2.1/16".parse().unwrap()]);
    assert_eq!(network.plan.gateways, [ip("169.254.2.2")]);
    let error = of("-6", HostNetwork::default()).unwrap_err().to_string();
    assert!(error.contains("--address"), "{error}");
}

#[test]
fn dns_forward_leads_to_the_first_server_of_its_family() {
    let v4 = config("--dns-forward 169.254.1.1").resolvers;
    assert_eq!(v4, [Alias { guest: ip("169.254.1.1"), host: ip("127.0.0.53") }]);
    let v6 = config("--dns-forward fd00::3").resolvers;
    assert_eq!(v6, [Alias { guest: ip("fd00::3"), host: ip("2001:db8::53") }]);
    let given = config("--dns-forward 169.254.1.1 --dns-host 192.0.2.53").resolvers;
    assert_eq!(given[0].host, ip("192.0.2.53"));
    assert!(of("--dns-host 192.0.2.53", host()).is_err());
}

#[test]
fn name_servers_of_the_host_are_followed_unless_options_name_others() {
    let new = [ip("192.0.2.9")];
    let (_, mut network) = of("--dns-forward 169.254.1.1 --dhcp-dns", host()).unwrap();
    assert_eq!(network.follow_name_servers(&[]), None);
    let resolvers = vec![Alias { guest: ip("169.254.1.1"), host: new[0] }];
    let order =
        UplinkOrder::NameServers { resolvers, offered: new.to_vec(), unoffered: Vec::new() };
    assert_eq!(network.follow_name_servers(&new), Some(order));
    assert_eq!(network.follow_name_servers(&new), None);
    for line in
        ["--dhcp-dns -D 192.0.2.3", "-D none --dns-forward 169.254.1.1 --dns-host 192.0.2.53"]
    {
        let (_, mut network) = of(line, host()).unwrap();
        assert_eq!(network.follow_name_servers(&new), None, "{line}");
    }
}

#[test]
fn policy_reads_queries_to_servers_that_the_namespace_knows_otherwise() {
    // The other server is a loopback address, which only a stand-in reaches.
    let servers = [ip("2001:db8::53")];
    for line in ["", "--allow a.org"] {
        // A session without a policy may get one.
        assert_eq!(config(line).unoffered, servers, "{line}");
    }
    let link_local = [ip("169.254.1.1"), ip("192.0.2.3")];
    assert_eq!(config("-D 169.254.1.1 -D 192.0.2.3").unoffered, link_local[1..]);
    assert_eq!(config("--allow a.org -D 169.254.1.1 -D 192.0.2.3").unoffered, link_local);
    assert_eq!(config("--allow a.org --dns-forward 169.254.1.1").unoffered, servers);
    assert_eq!(config("--allow a.org -D 192.0.2.3").unoffered, [ip("192.0.2.3")]);
    for line in ["--allow a.org --dhcp-dns", "--allow a.org -D none"] {
        assert!(config(line).unoffered.is_empty(), "{line}");
    }
    let (_, mut network) = of("--allow a.org", host()).unwrap();
    let unoffered = vec![ip("192.0.2.9")];
    let (resolvers, offered) = (Vec::new(), Vec::new());
    let order = UplinkOrder::NameServers { resolvers, offered, unoffered };
    assert_eq!(network.follow_name_servers(&[ip("192.0.2.9")]), Some(order));
}

#[test]
fn host_is_reachable_only_by_options_that_say_so() {
    assert_eq!(config("--no-map-gw").aliases, config("").aliases);
    assert!(config("").aliases.is_empty() && config("").loopback.is_empty());
    let aliases = config("--map-gw -4 --map-guest-addr 169.254.1.2").aliases;
    let loopback = Alias { guest: ip("192.0.2.1"), host: ip("127.0.0.1") };
    let own = Alias { guest: ip("169.254.1.2"), host: ip("192.0.2.7") };
    assert_eq!(aliases, [loopback, own]);
    assert!(config("--map-host-loopback 10.0.0.9 --map-host-loopback none").aliases.is_empty());
    for line in
        ["--map-guest-addr 192.0.2.7", "--map-host-loopback 127.0.0.1", "--dns-forward 192.0.2.8"]
    {
        assert!(of(line, host()).is_err(), "{line}");
    }
}

#[test]
fn name_servers_are_offered_only_with_option() {
    assert!(config("").name_servers.is_empty() && config("").search.is_empty());
    let offered = config("--dhcp-dns --dhcp-search");
    assert_eq!((offered.name_servers.len(), offered.search.len()), (2, 1));
    assert_eq!(config("--dhcp-dns -D 192.0.2.3").name_servers, [ip("192.0.2.3")]);
    assert!(config("--dhcp-dns -D none").name_servers.is_empty());
}

#[test]
fn protocols_are_left_out_by_option() {
    let left_out = |line: &str| LeftOut(config(line).left_out);
    assert_eq!(left_out(""), LeftOut::default());
    assert_eq!(left_out("--no-dhcp --no-ra"), LeftOut::DHCP.union(LeftOut::ROUTER_ADVERTISEMENTS));
}

#[test]
fn ports_that_cannot_be_forwarded_are_refused() {
    let (_, network) = of("-4", host()).unwrap();
    for line in
        ["-t %eth0/auto", "-t all", "-u ~22", "-t 80:192.0.2.5/81", "-t ::1/0x", "-t ::1/40000"]
    {
        let words: Vec<_> = format!("-4 {line}").split_whitespace().map(Into::into).collect();
        let Ok(args) = parse(&words) else { continue };
        let error = network.listen(&args).unwrap_err().to_string();
        assert!(error.starts_with("-t ") || error.starts_with("-u "), "{line}: {error}");
    }
    let words = ["-t", "auto,~22", "-t", "127.0.0.1/8000-8010,auto", "-u", "none"].map(Into::into);
    let auto = network.auto_forwards(&parse(&words).unwrap()).unwrap();
    assert_eq!((auto.len(), auto[0].taken.len(), auto[1].taken.len()), (2, 11, 11));
    assert_eq!((auto[0].addresses[0], auto[1].addresses[0]), (ip("0.0.0.0"), ip("127.0.0.1")));
    let words = ["-t", "auto", "-t", "none"].map(Into::into);
    assert!(network.listen(&parse(&words).unwrap()).unwrap().forwards.is_empty());
}

#[test]
fn listener_leads_to_the_mapped_port() {
    let (_, network) = of("", host()).unwrap();
    // Any free ports will do. They must not be ephemeral ones, which other tests may have.
    let words = ["-t", "127.0.0.1/18431-18432:80-81", "-u", "::1/18433:53"].map(Into::into);
    let Listeners { forwards, sockets } = network.listen(&parse(&words).unwrap()).unwrap();
    let to: Vec<_> = forwards.iter().map(|f| (f.protocol, f.ipv6, f.guest_port)).collect();
    let (tcp, udp) = (ForwardProtocol::Tcp, ForwardProtocol::Udp);
    assert_eq!(to, [(tcp, false, 80), (tcp, false, 81), (udp, true, 53)]);
    assert_eq!(sockets.len(), 3);
}

#[test]
fn port_of_a_session_that_ends_is_awaited() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let (args, network) = of(&format!("-t 127.0.0.1/{port}:80"), host()).unwrap();
    let start = std::time::Instant::now();
    let error = network.listen(&args).unwrap_err();
    let error = ringfence_hostnet::causes::causes(&error);
    assert!(error.contains("in use"), "{error}");
    assert!(start.elapsed() >= TAKEN_PATIENCE);
    let ends = std::thread::spawn(move || {
        std::thread::sleep(TAKEN_PATIENCE / 20);
        drop(taken);
    });
    assert_eq!(network.listen(&args).unwrap().forwards.len(), 1);
    ends.join().unwrap();
}

#[test]
fn uplink_behind_a_proxy_answers_at_every_name_server_and_without_any() {
    let config = config("--upstream-proxy http://192.0.2.1:3128 --dhcp-search");
    let own: Vec<_> = NAME_SERVERS.into_iter().collect();
    assert!(own.iter().all(|ip| config.unoffered.contains(ip)), "{:?}", config.unoffered);
    assert!(config.search.is_empty(), "the proxy completes names");
    let wishes = |line: &str| of(line, host()).unwrap().1.wishes;
    let alone = wishes("--upstream-proxy http://192.0.2.1:3128 --dns-forward 169.254.1.1");
    assert_eq!(alone.servers(&[]), own);
    assert_eq!(alone.stand_ins(&[], &[]), [Alias { guest: ip("169.254.1.1"), host: own[0] }]);
    assert!(wishes("--dns-forward 169.254.1.1").stand_ins(&[], &[]).is_empty());
}
