use super::*;

fn read(line: &str) -> anyhow::Result<(PastaArgs, Target)> {
    let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
    let args = parse(&words).map_err(|error| anyhow::anyhow!(error.to_string()))?;
    let target = check(&args)?;
    Ok((args, target))
}

/// Options of the manual page, 2023 to 2026, with a valid value.
pub(super) const OPTIONS: &[&str] = &[
    "-d",
    "--debug",
    "--trace",
    "--stats 1",
    "-q",
    "--quiet",
    "-f",
    "--foreground",
    "-e",
    "--stderr",
    "-l f",
    "--log-file f",
    "--log-size 8192",
    "--runas 1:1",
    "-c p",
    "--conf-path p",
    "--version",
    "-p f",
    "--pcap f",
    "-P f",
    "--pid f",
    "-m 1500",
    "--mtu 1500",
    "-a 10.0.0.1",
    "--address 10.0.0.1/8",
    "-n 24",
    "--netmask 255.0.0.0",
    "-M 2:0:0:0:0:1",
    "--mac-addr 2:0:0:0:0:1",
    "-g 10.0.0.1",
    "--gateway fe80::1",
    "-i e0",
    "--interface e0",
    "-o 10.0.0.1",
    "--outbound ::1",
    "--outbound-if4 e0",
    "--outbound-if6 e0",
    "-D none",
    "--dns 10.0.0.1",
    "--dns-forward 10.0.0.1",
    "--dns-host 10.0.0.1",
    "-S none",
    "--search none",
    "--no-dhcp-dns",
    "--dhcp-dns",
    "--no-dhcp-search",
    "--dhcp-search",
    "--no-tcp",
    "--no-udp",
    "--no-icmp",
    "--no-dhcp",
    "--no-ndp",
    "--no-dhcpv6",
    "--no-ra",
    "--freebind",
    "--map-host-loopback none",
    "--no-map-gw",
    "--chroot-fallback",
    "--map-guest-addr none",
    "-4",
    "--ipv4-only",
    "-6",
    "--ipv6-only",
    "-H n",
    "--hostname n",
    "--fqdn n",
    "-t none",
    "--tcp-ports auto",
    "-u all",
    "--udp-ports 1",
    "-s p",
    "--socket p",
    "--socket-path p",
    "--vhost-user",
    "--print-capabilities",
    "--repair-path p",
    "--migrate-exit",
    "--migrate-no-linger",
    "-F 3",
    "--fd 3",
    "-1",
    "--one-off",
    "-I t0",
    "--ns-ifname t0",
    "-T auto",
    "--tcp-ns 1",
    "-U none",
    "--udp-ns none",
    "--host-lo-to-ns-lo",
    "--userns p --netns p",
    "--netns p",
    "--netns-only",
    "--no-netns-quit",
    "--no-pidns",
    "--config-net",
    "--no-copy-routes",
    "--no-copy-addrs",
    "--ns-mac-addr 2:0:0:0:0:1",
    "--no-splice",
    "--splice-only",
];

#[test]
fn every_option_of_the_manual_page_is_implemented_or_refused_by_name() {
    for option in OPTIONS {
        let Err(error) = read(option) else { continue };
        let text = error.to_string();
        let name = option.split(' ').next().unwrap();
        let is_named = args::REFUSED.iter().any(|((long, short, _), why)| {
            let is_this = name == format!("--{long}")
                || short.is_some_and(|short| name == format!("-{short}"));
            is_this && text == format!("--{long} is not supported: {why}")
        });
        assert!(is_named, "{option}: {text}");
    }
}

#[test]
fn unknown_option_is_reported_as_by_getopt() {
    let words = ["--map-guest-address".into(), "x".into()];
    let error = parse(&words).unwrap_err();
    assert_eq!(error.kind(), clap::error::ErrorKind::UnknownArgument);
    assert_eq!(complain(program::PASTA, &error), STATUS_FAILED);
}

#[test]
fn arguments_of_podman_are_accepted() {
    let line = "--config-net -t 8080-8080:80-80 --dns-forward 169.254.1.1 -u none -T none -U none \
                --no-map-gw --quiet --netns /run/user/1000/netns/netns-1 --map-guest-addr 169.254.1.2";
    let (args, target) = read(line).unwrap();
    assert!(args.config_net && args.quiet && !args.map_gw);
    let netns = "/run/user/1000/netns/netns-1".into();
    assert_eq!(target, Target::Existing { netns, userns: None });
}

#[test]
fn arguments_of_rootlesskit_are_accepted() {
    let line = "--stderr --ns-ifname=tap0 --mtu=65520 --config-net --address=10.0.2.100 --netmask=24 \
                --gateway=10.0.2.2 --dns-forward=10.0.2.3 --ipv4-only --tcp-ports=none --udp-ports=none 17";
    let (args, target) = read(line).unwrap();
    assert!(args.ipv4_only);
    let (netns, userns) = ("/proc/17/ns/net".into(), Some("/proc/17/ns/user".into()));
    assert_eq!(target, Target::Existing { netns, userns });
}

#[test]
fn last_of_contradicting_options_takes_effect() {
    assert!(!read("--map-gw --no-map-gw").unwrap().0.map_gw);
    assert!(read("--no-map-gw --map-gw").unwrap().0.map_gw);
    let (args, _) = read("-4 -6 -m 1500 -m 1400 -q -q").unwrap();
    assert!(args.ipv6_only && !args.ipv4_only && args.mtu == 1400);
}

#[test]
fn long_option_may_be_abbreviated_and_short_ones_combined() {
    let (args, _) = read("--config -qft80 --tcp-p=81").unwrap();
    assert!(args.config_net && args.quiet && args.foreground);
    assert_eq!(args.tcp_ports.len(), 2);
}

#[test]
fn target_is_one_of_command_process_and_file() {
    let target = |line: &str| read(line).unwrap().1;
    assert_eq!(target("-q ip -t 5"), Target::Command(["ip", "-t", "5"].map(OsString::from).into()));
    assert_eq!(
        target("--netns x"),
        Target::Existing { netns: "/run/netns/x".into(), userns: None }
    );
    for line in ["--netns x 17", "--netns x true", "--userns x", "--userns x true", "--no-pidns 17"]
    {
        assert!(read(line).is_err(), "{line}");
    }
}

#[test]
fn program_is_known_by_its_name_or_its_first_argument() {
    let found = |line: &str| {
        let words = arguments(program::PASTA, line.split(' ').map(OsString::from));
        words.map(|words| words.len())
    };
    assert_eq!(found("/usr/bin/pasta"), Some(0));
    assert_eq!(found("pasta pasta -q"), Some(2));
    assert_eq!(found("ringfence pasta -q"), Some(1));
    assert_eq!(found("ringfence run pasta"), None);
}
