//! Address plan of a switch: assigns Ethernet and IP addresses to guests and to the host's port.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ringfence_net::vif::toolstack::mac_text;
use ringfence_switch::forwarding::filter::FILTER_ADDRESSES_MAX;

use ringfence_hostnet::address::Address;
use ringfence_hostnet::address::AddressError as NoAddress;

/// Host numbers of guests in a /16, without the host's port (1) and broadcast.
const HOSTS: core::ops::Range<u16> = 2..0xFFFF;
/// Host number of the host's port.
const HOST_LEG: u16 = 1;

/// Reasons for which addresses cannot be assigned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Another guest has the address.
    #[error("{0} is taken on this switch; choose another --address, or none")]
    Taken(IpAddr),
    /// One guest requests an address twice.
    #[error("--address {0} is given twice; give it once")]
    Twice(IpAddr),
    /// One guest requests too many addresses.
    #[error("{0} addresses for one guest; give --address at most {FILTER_ADDRESSES_MAX} times")]
    TooMany(usize),
    /// No host may have the address.
    #[error(transparent)]
    Unusable(#[from] NoAddress),
    /// Another port has the Ethernet address.
    #[error("{} is taken on this switch; choose another --mac, and give it to the machine (QEMU: mac=)", mac_text(*mac))]
    MacTaken { mac: [u8; 6] },
    /// Ethernet address that no guest can request.
    #[error("--mac {}: it must be that of one host, and not begin with 02:72:66", mac_text(*mac))]
    MacUnusable { mac: [u8; 6] },
    /// All addresses of the plan are in use.
    #[error("no address is free on this switch")]
    Exhausted,
}

/// Values of N in a plan: above the low networks that people choose by hand.
const NUMBERS: core::ops::Range<u8> = 128..192;

/// Addresses of a switch: `10.N.0.0/16` and `fd72:6672:6663:N::/64`. N is a hash of the switch's
/// name, so that the ports of one host on several switches mostly differ. [`AddressPlan::avoid`] changes it.
#[derive(Debug)]
pub struct AddressPlan {
    number: u8,
    taken: BTreeSet<IpAddr>,
    /// Ethernet addresses that guests requested.
    macs: BTreeSet<[u8; 6]>,
}

/// First bytes of the Ethernet addresses of a plan.
const PREFIX: [u8; 3] = [0x02, 0x72, 0x66];

/// Returns the addresses of a host in the plan of this number.
fn both(number: u8, host: u16) -> [Option<Address>; 2] {
    let [high, low] = host.to_be_bytes();
    let v4 = Ipv4Addr::new(10, number, high, low);
    let v6 = Ipv6Addr::new(0xfd72, 0x6672, 0x6663, u16::from(number), 0, 0, 0, host);
    [Address::new(v4.into(), 16).ok(), Address::new(v6.into(), 64).ok()]
}

/// Addresses assigned to one guest, until [`AddressPlan::release`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assigned {
    pub mac: [u8; 6],
    pub addresses: Vec<Address>,
}

impl AddressPlan {
    /// Creates the plan of the switch `name`.
    pub fn new(name: &str) -> AddressPlan {
        // FNV-1a. Any hash with an even distribution works.
        let hash =
            name.bytes().fold(0x811c_9dc5_u32, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193));
        let [.., low] = hash.to_be_bytes();
        AddressPlan {
            number: NUMBERS.start + low % 64,
            taken: BTreeSet::new(),
            macs: BTreeSet::new(),
        }
    }

    /// Moves the plan to networks that overlap with none of `networks`, which the first guest reaches by its
    /// uplink. The plan stays where it is if a guest has an address already, or if no number fits.
    pub fn avoid(&mut self, networks: &[Address]) {
        if !self.taken.is_empty() {
            return;
        }
        let fits = |number: &u8| {
            let own = both(*number, HOST_LEG);
            !own.iter().flatten().any(|own| networks.iter().any(|other| own.overlaps(*other)))
        };
        // The number from the name comes first, then those above it, then those below it.
        let mut candidates = (self.number..NUMBERS.end).chain(NUMBERS.start..self.number);
        self.number = candidates.find(fits).unwrap_or(self.number);
    }

    fn both(&self, host: u16) -> [Option<Address>; 2] {
        both(self.number, host)
    }

    fn mac(&self, host: u16) -> [u8; 6] {
        let [high, low] = host.to_be_bytes();
        let [a, b, c] = PREFIX;
        [a, b, c, self.number, high, low]
    }

    /// Returns the requested Ethernet address, if no other guest has it.
    fn wanted_mac(&self, mac: [u8; 6]) -> Result<[u8; 6], AddressError> {
        let is_of_group = mac[0] & 1 != 0;
        if is_of_group || mac == [0; 6] || mac.starts_with(&PREFIX) {
            return Err(AddressError::MacUnusable { mac });
        }
        if self.macs.contains(&mac) {
            return Err(AddressError::MacTaken { mac });
        }
        Ok(mac)
    }

    /// Assigns addresses to a domain: the requested ones, or else one IPv4 and one IPv6 address. Without `mac` the Ethernet
    /// address is that of the domain.
    ///
    /// # Errors
    ///
    /// [`AddressError`]; nothing is assigned then.
    pub fn assign(
        &mut self,
        domain: u16,
        mac: Option<[u8; 6]>,
        wanted: &[Address],
    ) -> Result<Assigned, AddressError> {
        let wanted_mac = mac.map(|mac| self.wanted_mac(mac)).transpose()?;
        let addresses = if wanted.is_empty() { self.pick()? } else { wanted.to_vec() };
        check(&addresses)?;
        if let Some(taken) = addresses.iter().find(|a| self.taken.contains(&a.ip())) {
            return Err(AddressError::Taken(taken.ip()));
        }
        self.taken.extend(addresses.iter().map(|a| a.ip()));
        self.macs.extend(wanted_mac);
        Ok(Assigned { mac: wanted_mac.unwrap_or_else(|| self.mac(domain)), addresses })
    }

    fn pick(&self) -> Result<Vec<Address>, AddressError> {
        let free =
            |address: &Option<Address>| address.is_some_and(|a| !self.taken.contains(&a.ip()));
        HOSTS
            .map(|host| self.both(host))
            .find(|both| both.iter().all(free))
            .map(|both| both.into_iter().flatten().collect())
            .ok_or(AddressError::Exhausted)
    }

    /// Assigns the addresses of the host's port.
    ///
    /// # Errors
    ///
    /// [`AddressError::Taken`] if a guest has one of its addresses, or the host has a port already.
    pub fn assign_host_leg(&mut self) -> Result<Assigned, AddressError> {
        let wanted: Vec<_> = self.both(HOST_LEG).into_iter().flatten().collect();
        // Domain numbers begin at 1, so 0 is free for the Ethernet address of the host's port.
        self.assign(0, None, &wanted)
    }

    /// Makes addresses available again.
    pub fn release(&mut self, assigned: &Assigned) {
        for address in &assigned.addresses {
            self.taken.remove(&address.ip());
        }
        self.macs.remove(&assigned.mac);
    }
}

/// Validates the addresses of one guest. The request may come from a program other than the
/// launcher.
fn check(addresses: &[Address]) -> Result<(), AddressError> {
    if addresses.len() > FILTER_ADDRESSES_MAX {
        return Err(AddressError::TooMany(addresses.len()));
    }
    let mut seen = BTreeSet::new();
    for address in addresses {
        Address::new(address.ip(), address.prefix())?.check_assignable()?;
        if !seen.insert(address.ip()) {
            return Err(AddressError::Twice(address.ip()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_addresses_are_assigned_again() {
        let mut plan = AddressPlan::new("s");
        let a = plan.assign(1, None, &[]).unwrap();
        let b = plan.assign(2, None, &[]).unwrap();
        assert_eq!(a.addresses.len(), 2);
        assert!(a.addresses.iter().all(|x| !b.addresses.contains(x)) && a.mac != b.mac);
        plan.release(&a);
        assert_eq!(plan.assign(3, None, &[]).unwrap().addresses, a.addresses);
    }

    #[test]
    fn plan_avoids_networks_of_first_guest_alone() {
        let mut plan = AddressPlan::new("s");
        let own = plan.assign(1, None, &[]).unwrap();
        let [v4, v6] = own.addresses[..] else { panic!("{own:?}") };
        for network in [v4, v6, "10.128.0.0/10".parse().unwrap()] {
            let mut stays = AddressPlan::new("s");
            stays.assign(1, None, &["192.0.2.7/24".parse().unwrap()]).unwrap();
            stays.avoid(&[network]);
            assert_eq!(stays.assign(2, None, &[]).unwrap().addresses, own.addresses, "{network}");
        }
        // Every network but one is in use.
        let free = NUMBERS.start + (plan.number - NUMBERS.start + 63) % 64;
        let used = NUMBERS.filter(|number| *number != free);
        let used: Vec<Address> =
            used.map(|number| format!("10.{number}.7.7/24").parse().unwrap()).collect();
        for (networks, second) in [(&[v4][..], None), (&[v6], None), (&used, Some(free))] {
            let mut moved = AddressPlan::new("s");
            moved.avoid(networks);
            let assigned = moved.assign(1, None, &[]).unwrap();
            let overlap = |a: &Address| networks.iter().any(|network| a.overlaps(*network));
            assert!(!assigned.addresses.iter().any(overlap), "{assigned:?}");
            assert!(second.is_none_or(|second| moved.number == second), "{assigned:?}");
        }
        // No network is free.
        let mut stays = AddressPlan::new("s");
        stays.avoid(&["10.0.0.0/8".parse().unwrap()]);
        assert_eq!(stays.assign(1, None, &[]).unwrap(), own);
    }

    #[test]
    fn address_assigned_to_one_guest_is_refused_to_another() {
        let mut plan = AddressPlan::new("s");
        let wanted: Address = "192.0.2.7/24".parse().unwrap();
        assert_eq!(plan.assign(1, None, &[wanted]).unwrap().addresses, [wanted]);
        assert_eq!(plan.assign(2, None, &[wanted]), Err(AddressError::Taken(wanted.ip())));
    }

    #[test]
    fn ethernet_address_is_that_of_one_host_and_of_one_guest() {
        let mut plan = AddressPlan::new("s");
        let wanted = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
        let first = plan.assign(1, Some(wanted), &[]).unwrap();
        assert_eq!(first.mac, wanted);
        let taken = AddressError::MacTaken { mac: wanted };
        assert!(taken.to_string().starts_with("52:54:00:12:34:56 is taken"), "{taken}");
        assert_eq!(plan.assign(2, Some(wanted), &[]), Err(taken));
        plan.release(&first);
        assert_eq!(plan.assign(3, Some(wanted), &[]).unwrap(), first, "nothing was taken by 2");
        for mac in [[0; 6], [0xff; 6], [1, 0, 0x5e, 0, 0, 1], [2, 0x72, 0x66, 130, 0, 1]] {
            let refused = plan.assign(4, Some(mac), &[]);
            assert_eq!(refused, Err(AddressError::MacUnusable { mac }));
        }
    }

    #[test]
    fn address_given_twice_is_refused() {
        let mut plan = AddressPlan::new("s");
        let [a, b]: [Address; 2] = ["192.0.2.7/24", "192.0.2.7/28"].map(|a| a.parse().unwrap());
        assert_eq!(plan.assign(1, None, &[a, b]), Err(AddressError::Twice(a.ip())));
        assert!(plan.assign(1, None, &[a]).is_ok(), "nothing was taken");
    }

    #[test]
    fn request_of_another_program_is_checked() {
        let mut plan = AddressPlan::new("s");
        let read = |text: &str| serde_json::from_str::<Address>(text).unwrap();
        let network: Address = "10.0.0.0/24".parse().unwrap();
        let long = read(r#"{"ip":"10.0.0.1","prefix":200}"#);
        let loopback = read(r#"{"ip":"127.0.0.1","prefix":8}"#);
        for wanted in [network, long, loopback] {
            let refused = plan.assign(1, None, &[wanted]);
            assert!(matches!(refused, Err(AddressError::Unusable(_))), "{wanted}");
        }
        let many: Vec<Address> =
            (1..=17).map(|n| format!("10.0.0.{n}/24").parse().unwrap()).collect();
        assert_eq!(plan.assign(1, None, &many), Err(AddressError::TooMany(17)));
        assert!(plan.assign(1, None, &many[..16]).is_ok());
    }

    #[test]
    fn second_host_leg_is_refused() {
        let mut plan = AddressPlan::new("s");
        let leg = plan.assign_host_leg().unwrap();
        assert!(plan.assign_host_leg().is_err());
        let guest = plan.assign(1, None, &[]).unwrap();
        assert!(guest.mac != leg.mac && guest.addresses != leg.addresses);
    }
}
