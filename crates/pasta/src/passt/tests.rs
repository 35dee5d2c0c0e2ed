use super::super::machine::{Endpoint, Place};
use super::super::passt_args::{OF_PASTA, REFUSED};
use super::super::tests::OPTIONS;
use super::*;
use ringfence_uplink_process::link::{PoolRule, Transport};

fn read(line: &str) -> anyhow::Result<Started> {
    let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
    let args = parse(&words).map_err(|error| anyhow::anyhow!(error.to_string()))?;
    started(args)
}

fn endpoint(line: &str) -> Endpoint {
    match read(line).unwrap().target {
        Target::Machine(endpoint) => endpoint,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_option_of_the_manual_page_is_implemented_or_refused_by_name() {
    for option in OPTIONS {
        let Err(error) = read(option) else { continue };
        let text = error.to_string();
        let name = option.split(' ').next().unwrap();
        let refused = |long: &str| text.starts_with(&format!("--{long} is not supported: "));
        let is_named = super::super::args::REFUSED
            .iter()
            .map(|((long, short, _), _)| (*long, *short))
            .chain(OF_PASTA.iter().map(|(_, long)| (*long, None)))
            .any(|(long, _)| refused(long));
        // Automatic ports and lists without limit are refused by the entry.
        let is_port = ["--tcp-ports", "-u"].contains(&name) && text.contains("name them");
        assert!(is_named || is_port, "{option}: {text}");
    }
}

#[test]
fn option_of_pasta_is_refused_by_name() {
    for (line, name) in [
        ("--config-net", "config-net"),
        ("-I tap0", "ns-ifname"),
        ("--netns x", "netns"),
        ("-T none", "tcp-ns"),
        ("--host-lo-to-ns-lo --version", "host-lo-to-ns-lo"),
    ] {
        let error = read(line).err().unwrap().to_string();
        assert!(error.starts_with(&format!("--{name} is not supported: ")), "{error}");
    }
    assert!(read("-q sh").is_err(), "there is no command to run");
    for (name, why) in REFUSED {
        let value = if name.ends_with("path") { " x" } else { "" };
        let error = read(&format!("--{name}{value}")).err().unwrap().to_string();
        assert_eq!(error, format!("--{name} is not supported: {why}"));
    }
}

#[test]
fn socket_is_named_probed_or_inherited() {
    let transport = Transport::Stream;
    let at = |place, one_off| Endpoint { place, program: PASST, one_off, transport };
    assert_eq!(endpoint(""), at(Place::Probed, false));
    assert_eq!(endpoint("-1 -s a"), at(Place::Path("a".into()), true));
    assert_eq!(endpoint("--socket a --socket b --one-off"), at(Place::Path("b".into()), true));
    assert_eq!(endpoint("--socket-path a"), at(Place::Path("a".into()), false));
    assert_eq!(endpoint("-F 3"), at(Place::Inherited(3), false));
    assert!(read("-F 3 -s a").is_err() && read("-F x").is_err());
}

#[test]
fn arguments_of_libvirt_are_accepted() {
    let line = "--one-off --socket /run/user/0/1-vhu-net0.socket --pid /run/user/0/1-passt.pid --interface eth0 \
                --log-file /tmp/f --address 10.77.0.2 --netmask 24 --address 2001:db8:77::2 --tcp-ports 2022:22 \
                --udp-ports 127.0.0.1%lo/5000-5020:6000-6020,~5010-5015";
    let Started { args, .. } = read(line).unwrap();
    assert_eq!((args.address.len(), args.tcp_ports.len(), args.udp_ports.len()), (2, 1, 1));
    assert!(!args.foreground && args.interface.as_deref() == Some("eth0"));
    assert_eq!(endpoint(line).transport, Transport::Stream);
    assert_eq!(
        endpoint(&format!("--vhost-user {line}")).transport,
        Transport::VhostUser { pool: PoolRule::Any, pairs: 1 }
    );
    let vfkit = endpoint("--vfkit -s a");
    assert_eq!((vfkit.transport, vfkit.one_off), (Transport::Datagram, true));
    assert!(read("--vfkit --vhost-user").is_err());
}

#[test]
fn pool_is_required_of_shared_memory_only() {
    let transport = |line: &str| endpoint(line).transport;
    let at_most = Transport::VhostUser { pool: PoolRule::AtMost(64 << 20), pairs: 1 };
    assert_eq!(transport("--vhost-user --require-pool auto --require-pool 64M"), at_most);
    let marked = Transport::VhostUser { pool: PoolRule::Marked, pairs: 1 };
    assert_eq!(transport("--vhost-user --require-pool auto"), marked);
    for line in ["--require-pool 64M", "--vfkit --require-pool auto"] {
        assert!(read(line).err().unwrap().to_string().contains("--vhost-user"), "{line}");
    }
    assert!(read("--vhost-user --require-pool all").is_err());
    let status = read("--vhost-user --status-socket a").unwrap().args.status_socket;
    assert_eq!(status, Some("a".into()));
}

#[test]
fn name_servers_and_domains_are_offered_unless_an_option_says_otherwise() {
    let args = |line: &str| read(line).unwrap().args;
    assert!(args("").dhcp_dns && args("").dhcp_search);
    assert!(!args("--no-dhcp-dns").dhcp_dns && args("--no-dhcp-dns").dhcp_search);
    assert!(!args("--no-dhcp-search").dhcp_search);
}

#[test]
fn ports_follow_no_listeners_of_a_machine() {
    for line in ["-t auto", "-u auto,~80"] {
        assert!(read(line).err().unwrap().to_string().contains("name them"), "{line}");
    }
    assert!(read("-t 80,81:82 -u none").is_ok());
}

#[test]
fn help_speaks_of_machines_and_hides_options_of_pasta() {
    let mut command = PasstCommandLine::command();
    let help = command.render_long_help().to_string();
    assert!(!help.contains("namespace"), "{help}");
    for word in [
        "--socket",
        "--fd",
        "--vhost-user",
        "--require-pool",
        "--status-socket",
        "--vfkit",
        "--no-dhcp-dns",
        "Network of the guest",
    ] {
        assert!(help.contains(word), "{word}: {help}");
    }
    for word in ["--netns", "--config-net", "--splice-only", "--migrate-exit", "PID|COMMAND"] {
        assert!(!help.contains(word), "{word}: {help}");
    }
}
