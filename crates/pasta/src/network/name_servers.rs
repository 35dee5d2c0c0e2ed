//! Name servers of a namespace: those of the options, of the host, and the upstream proxy's.

use std::net::IpAddr;

use anyhow::bail;
use ringfence_uplink::access::is_link_local;
use ringfence_uplink_process::Alias;
use ringfence_uplink_process::network_plan::NetworkPlan;
use ringfence_uplink_process::upstream::NAME_SERVERS;

use crate::args::PastaArgs;
use crate::values::OrNone;

/// Name servers that the options ask for, before those of the host are known.
#[derive(Clone, Debug)]
pub(super) struct NameServerWishes {
    given: Vec<IpAddr>,
    without: bool,
    forward: Vec<IpAddr>,
    host: Vec<IpAddr>,
    pub(super) offers: bool,
    /// There is an egress policy from the start.
    has_policy: bool,
    /// An upstream proxy looks names up.
    pub(super) proxied: bool,
}

impl NameServerWishes {
    pub(super) fn of(args: &PastaArgs) -> anyhow::Result<NameServerWishes> {
        let (given, without) = OrNone::list(&args.dns);
        let (forward, host) = (args.dns_forward.clone(), args.dns_host.clone());
        if !host.is_empty() && forward.is_empty() {
            bail!("--dns-host names the end of --dns-forward, and there is none");
        }
        let (offers, has_policy) = (args.dhcp_dns, args.has_policy());
        let proxied = args.egress.proxy.upstream_proxy.is_some();
        Ok(NameServerWishes { given, without, forward, host, offers, has_policy, proxied })
    }

    /// Returns the name servers of the namespace.
    pub(super) fn servers(&self, of_host: &[IpAddr]) -> Vec<IpAddr> {
        match (&self.given[..], self.without) {
            ([], true) => Vec::new(),
            ([], false) if self.proxied && of_host.is_empty() => NAME_SERVERS.to_vec(),
            ([], false) => of_host.to_vec(),
            (given, _) => given.to_vec(),
        }
    }

    /// Returns the name servers whose queries an egress policy reads, besides those that are offered: a namespace may have
    /// the host's resolv.conf. A policy that comes later opens no link-local one.
    pub(super) fn unoffered(&self, of_host: &[IpAddr], plan: &NetworkPlan) -> Vec<IpAddr> {
        let servers = if self.offers { Vec::new() } else { self.servers(of_host) };
        // A server on the host itself stays out of reach without an option that says otherwise.
        let of_proxy = self.proxied.then_some(NAME_SERVERS).into_iter().flatten();
        let is_open = |ip: &IpAddr| self.has_policy || !is_link_local(*ip);
        let others =
            servers.into_iter().filter(|ip| !ip.is_loopback() && !plan.has(*ip) && is_open(ip));
        others.chain(of_proxy).collect()
    }

    /// Returns the stand-ins of `--dns-forward`. A name server of the same family is preferred.
    pub(super) fn stand_ins(&self, servers: &[IpAddr], of_host: &[IpAddr]) -> Vec<Alias> {
        let mut found = Vec::new();
        for guest in last_of_each_family(&self.forward) {
            let same =
                |list: &[IpAddr]| list.iter().find(|ip| ip.is_ipv4() == guest.is_ipv4()).copied();
            let any = |list: &[IpAddr]| list.first().copied();
            let host = same(&self.host).or_else(|| any(&self.host));
            let host = host.or_else(|| same(of_host)).or_else(|| same(servers));
            // Without any name server, queries are refused.
            let host = host.or_else(|| any(of_host)).or_else(|| any(servers));
            let host = host.or_else(|| self.proxied.then_some(NAME_SERVERS[0]));
            found.extend(host.map(|host| Alias { guest, host }));
        }
        found
    }
}

/// Returns the last address of each family.
pub(super) fn last_of_each_family(addresses: &[IpAddr]) -> impl Iterator<Item = IpAddr> + '_ {
    [true, false]
        .into_iter()
        .filter_map(|v4| addresses.iter().rev().find(|ip| ip.is_ipv4() == v4).copied())
}
