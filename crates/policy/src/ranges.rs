//! Address ranges that a rule for a name never opens.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ringfence_base::address::IpPrefix;

/// IPv4 prefixes that are not of the public Internet (IANA's special-purpose registry), without the
/// prefixes for documentation and benchmarks, which no network routes.
const SPECIAL_V4: [(Ipv4Addr, u8); 10] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
];

/// Returns `true` for addresses that a rule for a name never opens: private, shared, loopback, link-local,
/// multicast and reserved ones, metadata services of clouds, and IPv6 forms that embed such an IPv4 address.
pub fn is_special(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(_) => SPECIAL_V4
            .iter()
            .chain(&METADATA_V4)
            .any(|&(prefix, len)| IpPrefix::new(prefix, len).contains(ip)),
        IpAddr::V6(ip) => is_special_v6(ip),
    }
}

fn is_special_v6(ip: Ipv6Addr) -> bool {
    let [a, b, ..] = ip.segments();
    // Only 2000::/3 is assigned for public use; 64:ff9b::/96 translates public IPv4 addresses (RFC 6052).
    let translated = (a, b) == (0x64, 0xff9b) && ip.segments()[2..6] == [0; 4];
    if !translated && a & 0xe000 != 0x2000 {
        return true;
    }
    embedded_v4(ip, translated).is_some_and(|v4| is_special(v4.into()))
}

/// Returns the IPv4 address to which a translator or a 6to4 router would forward.
fn embedded_v4(ip: Ipv6Addr, translated: bool) -> Option<Ipv4Addr> {
    let bytes = ip.octets();
    let four = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes.get(at..at + 4)?).ok()?));
    match ip.segments()[0] {
        _ if translated => four(12),
        0x2002 => four(2),
        _ => None,
    }
}

/// Prefixes of metadata services of clouds, beside link-local addresses. They give credentials of the machine to whoever asks.
const METADATA_V4: [(Ipv4Addr, u8); 2] =
    [(Ipv4Addr::new(100, 100, 100, 200), 32), (Ipv4Addr::new(168, 63, 129, 16), 32)];
const METADATA_V6: [(Ipv6Addr, u8); 3] = [
    (Ipv6Addr::new(0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42), 128),
    (Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254), 128),
];

/// Private prefixes, which a person may approve: hosts of one's own network.
const PRIVATE_V4: [(Ipv4Addr, u8); 4] = [
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
];

/// Returns `true` for addresses that can be approved while a guest runs: public and private ones, without metadata services.
/// Link-local, loopback, multicast and reserved addresses need a rule.
pub fn is_approvable(ip: IpAddr) -> bool {
    let is_in = |prefixes: &[(Ipv4Addr, u8)], ip| {
        prefixes.iter().any(|&(prefix, len)| IpPrefix::new(prefix, len).contains(ip))
    };
    match ip {
        IpAddr::V4(_) => !is_in(&METADATA_V4, ip) && (!is_special(ip) || is_in(&PRIVATE_V4, ip)),
        IpAddr::V6(v6) => {
            let [first, second, ..] = v6.segments();
            let translated = (first, second) == (0x64, 0xff9b) && v6.segments()[2..6] == [0; 4];
            let is_metadata =
                METADATA_V6.iter().any(|&(prefix, len)| IpPrefix::new(prefix, len).contains(ip));
            match embedded_v4(v6, translated) {
                Some(v4) => !is_special(ip) && is_approvable(v4.into()),
                None => !is_metadata && (!is_special(ip) || first & 0xfe00 == 0xfc00),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_and_private_addresses_are_approvable_and_metadata_is_not() {
        for ip in ["203.0.113.9", "10.0.0.1", "192.168.1.1", "100.64.0.1", "2001:db8::1", "fd12::1"]
        {
            assert!(is_approvable(ip.parse().unwrap()), "{ip}");
        }
        for ip in [
            "169.254.169.254",
            "169.254.1.1",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "127.0.0.1",
            "0.0.0.0",
            "224.0.0.1",
            "255.255.255.255",
            "fe80::a9fe:a9fe",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:42::42",
            "::1",
            "::",
            "ff02::1",
            "::ffff:10.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b::a83f:8110",
            "2002:a9fe:a9fe::1",
            "64:ff9b::a00:1",
        ] {
            assert!(!is_approvable(ip.parse().unwrap()), "{ip}");
        }
    }

    #[test]
    fn address_of_a_private_or_link_local_range_or_a_metadata_service_is_special() {
        for ip in [
            "168.63.129.16",
            "64:ff9b::a83f:8110",
            "10.1.2.3",
            "172.31.255.255",
            "192.168.1.1",
            "100.127.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "0.0.0.0",
            "255.255.255.255",
            "224.0.0.1",
            "::",
            "::1",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "ff02::1",
            "::ffff:192.0.2.1",
            "::ffff:8.8.8.8",
            "::8.8.8.8",
            "64:ff9b::a00:1",
            "2002:a00:1::1",
            "64:ff9b:1::1",
        ] {
            assert!(is_special(ip.parse().unwrap()), "{ip}");
        }
    }

    #[test]
    fn public_address_is_not_special() {
        for ip in [
            "8.8.8.8",
            "172.32.0.1",
            "100.128.0.1",
            "198.51.100.1",
            "2606:4700::1",
            "2001:db8:ffff::1",
            "64:ff9b::808:808",
            "2002:808:808::1",
        ] {
            assert!(!is_special(ip.parse().unwrap()), "{ip}");
        }
    }
}
