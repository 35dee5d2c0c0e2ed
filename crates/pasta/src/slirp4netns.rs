//! `ringfence slirp4netns`: the same uplink with the options of slirp4netns, as Podman before 5.0 and RootlessKit start it.
//!
//! The options are translated to those of pasta. The process stays in the foreground. It writes `1` to --ready-fd
//! when the network is usable, and ends when the other end of --exit-fd is closed. Clients of --api-socket change
//! ports while it runs.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::net::IpAddr;
use std::os::fd::RawFd;

use anyhow::{Context, bail};
use clap::{CommandFactory, FromArgMatches, Parser};
use ringfence_sys::namespaces::take_inherited;

use super::api::ApiServer;
use super::session::Session;
use super::slirp_args::{NetnsType, SlirpArgs};
use super::target::Target;
use super::values::MacArg;
use super::{check, complain, problem};
use crate::program::STATUS_FAILED;
use ringfence_hostnet::causes::causes;

/// Name by which other programs start slirp4netns.
pub const NAME: &str = "slirp4netns";
/// Addresses of the IPv6 network: the namespace, the router, the name server.
const IPV6: [&str; 3] = ["fd00::100/64", "fd00::2", "fd00::3"];

/// Command line of a process that was started by the name `slirp4netns`.
#[derive(Debug, Parser)]
#[command(name = NAME, disable_version_flag = true, max_term_width = 100)]
struct SlirpCommandLine {
    #[command(flatten)]
    args: SlirpArgs,
}

/// Main function of `slirp4netns`, with the arguments behind the program's name. Returns the exit status.
pub fn main(arguments: &[OsString]) -> u8 {
    let args = match parse(arguments) {
        Ok(args) => args,
        Err(error) => return complain(NAME, &error),
    };
    if args.version {
        println!("slirp4netns version {} (Ringfence)", env!("CARGO_PKG_VERSION"));
        return 0;
    }
    run(&args).unwrap_or_else(|error| {
        problem(NAME, &causes(&error));
        STATUS_FAILED
    })
}

fn parse(arguments: &[OsString]) -> Result<SlirpArgs, clap::Error> {
    let words = std::iter::once(OsString::from(NAME)).chain(arguments.iter().cloned());
    let command = SlirpCommandLine::command().args_override_self(true).infer_long_args(true);
    let matches = command.try_get_matches_from(words)?;
    SlirpCommandLine::from_arg_matches(&matches).map(|named| named.args)
}

fn run(args: &SlirpArgs) -> anyhow::Result<u8> {
    let take = |fd: Option<RawFd>, option: &str| {
        fd.map(|fd| take_inherited(fd).with_context(|| format!("{option} {fd}"))).transpose()
    };
    let ready = take(args.ready_fd, "--ready-fd")?;
    let stop = take(args.exit_fd, "--exit-fd")?;
    let (pasta, target) = translate(args)?;
    let path = args.api_socket.as_ref().map(std::path::Path::new);
    let api = path.map(|path| ApiServer::bind("--api-socket", path)).transpose()?;
    let mut session = Session::start(&pasta, &target)?;
    session.stop_with(stop);
    session.serve_api(api);
    if let Some(ready) = ready {
        File::from(ready).write_all(b"1").context("--ready-fd")?;
    }
    Ok(session.wait())
}

/// Translates the options to those of pasta.
fn translate(args: &SlirpArgs) -> anyhow::Result<(super::args::PastaArgs, Target)> {
    if args.target_type != "netns" {
        bail!("--target-type is not supported: only network namespaces are connected");
    }
    let cidr = args.cidr;
    let mut words: Vec<OsString> = Vec::new();
    let mut add = |option: &str, value: &str| words.push(format!("{option}={value}").into());
    add("--address", &format!("{}/{}", cidr.address(100), cidr.prefix));
    add("--mtu", &args.mtu.min(ringfence_uplink_process::MTU_DEFAULT).to_string());
    for (option, given, by_name, is_v4) in [
        ("--outbound-addr", &args.outbound_addr, "--outbound-if4", true),
        ("--outbound-addr6", &args.outbound_addr6, "--outbound-if6", false),
    ] {
        match given.as_ref().map(|given| (given, given.parse::<IpAddr>())) {
            Some((given, Ok(ip))) if ip.is_ipv4() != is_v4 => {
                bail!("{option} {given}: this is an address of the other family")
            }
            Some((given, Ok(_))) => add("--outbound", given),
            Some((given, Err(_))) => add(by_name, given),
            None => {}
        }
    }
    let [own, router, server] = IPV6;
    let mut networks = vec![(cidr.address(2).to_string(), cidr.address(3).to_string())];
    if args.enable_ipv6 {
        add("--address", own);
        networks.push((router.to_owned(), server.to_owned()));
    }
    for (router, server) in &networks {
        add("--gateway", router);
        if !args.disable_host_loopback {
            add("--map-host-loopback", router);
        }
        if !args.disable_dns {
            add("--dns-forward", server);
            add("--dns", server);
        }
    }
    if let Some(MacArg(mac)) = args.macaddress {
        let text: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        add("--ns-mac-addr", &text.join(":"));
    }
    add("--ns-ifname", args.interface.as_deref().unwrap_or_default());
    words.extend((!args.enable_ipv6).then(|| "--ipv4-only".into()));
    words.extend(args.configure.then(|| "--config-net".into()));
    words.extend((!args.disable_dns).then(|| "--dhcp-dns".into()));
    words.extend(["--quiet", "--foreground"].map(Into::into));
    let target = args.target.clone().unwrap_or_default();
    if let Some(userns) = &args.userns_path {
        words.extend(["--userns".into(), userns.clone()]);
    }
    match args.netns_type {
        NetnsType::Path => {
            let has_slash = target.as_encoded_bytes().contains(&b'/');
            let path =
                if has_slash { target } else { std::path::Path::new(".").join(target).into() };
            words.extend(["--no-netns-quit".into(), "--netns".into(), path]);
        }
        NetnsType::Pid if target.to_str().is_some_and(|text| text.parse::<u32>().is_ok()) => {
            words.push(target);
        }
        NetnsType::Pid => bail!("`{}` is not a process id", target.display()),
    }
    let mut pasta = super::parse(&words).map_err(|error| anyhow::anyhow!(error.to_string()))?;
    (pasta.egress, pasta.ask) = (args.egress.clone(), args.ask.clone());
    pasta.queues = args.queues;
    let target = check(&pasta)?;
    Ok((pasta, target))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> anyhow::Result<(super::super::args::PastaArgs, Target)> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        translate(&parse(&words).map_err(|error| anyhow::anyhow!(error.to_string()))?)
    }

    #[test]
    fn arguments_of_podman_4_are_accepted() {
        let line = "--disable-host-loopback --mtu=65520 --enable-sandbox --enable-seccomp --enable-ipv6 -c -r 3 \
                    -e 4 --netns-type=path --api-socket /run/user/1000/x.net /run/user/1000/netns/x tap0";
        let (pasta, target) = read(line).unwrap();
        assert_eq!((pasta.address.len(), pasta.mtu), (2, 65520));
        assert!(pasta.config_net && pasta.map_host_loopback.is_empty() && !pasta.ipv4_only);
        let netns = "/run/user/1000/netns/x".into();
        assert_eq!(target, Target::Existing { netns, userns: None });
    }

    #[test]
    fn network_has_the_addresses_of_slirp4netns() {
        let (pasta, _) = read("-c --cidr 10.9.8.0/24 17 tap0").unwrap();
        assert_eq!(pasta.address[0].ip.to_string(), "10.9.8.100");
        assert_eq!(pasta.gateway[0].to_string(), "10.9.8.2");
        assert_eq!(pasta.dns_forward[0].to_string(), "10.9.8.3");
        assert_eq!(pasta.map_host_loopback.len(), 1);
    }

    #[test]
    fn egress_options_are_those_of_pasta() {
        let line =
            "--allow a.test:80 --deny=b.test --policy p.toml --strict-sni --egress-log - 17 tap0";
        let (pasta, _) = read(line).unwrap();
        let egress = &pasta.egress;
        assert_eq!(
            (&egress.allow[..], &egress.deny[..]),
            (&["a.test:80".to_owned()][..], &["b.test".to_owned()][..])
        );
        assert_eq!(egress.policy, [std::path::PathBuf::from("p.toml")]);
        assert!(egress.strict_sni && egress.egress_log.is_some());
        assert!(!read("17 tap0").unwrap().0.has_policy());
        assert_eq!(read("17 tap0").unwrap().0.queues, 1);
        assert_eq!(read("--queues 3 17 tap0").unwrap().0.queues, 3);
        let (pasta, _) = read("--ask socket:ask --ask-within 7 17 tap0").unwrap();
        assert!(pasta.has_policy() && pasta.ask.ask_within == 7);
    }

    #[test]
    fn outbound_address_may_be_that_of_an_interface() {
        let (pasta, _) =
            read("--outbound-addr 192.0.2.9 --outbound-addr6 wan1 -6 17 tap0").unwrap();
        assert_eq!(pasta.outbound[0].to_string(), "192.0.2.9");
        assert_eq!((pasta.outbound_if4, pasta.outbound_if6.as_deref()), (None, Some("wan1")));
    }

    #[test]
    fn unsupported_and_malformed_arguments_are_refused() {
        for line in [
            "--outbound-addr ::1 17 tap0",
            "--outbound-addr6 10.0.0.1 17 tap0",
            "--outbound-addr a/b 17 tap0",
            "--target-type bess 17 tap0",
            "--cidr 10.0.2.1/24 17 tap0",
            "--cidr 10.0.2.0/26 17 tap0",
            "--mtu 65522 17 tap0",
            "17 a/b",
            "x tap0",
            "17",
        ] {
            assert!(read(line).is_err(), "{line}");
        }
    }
}
