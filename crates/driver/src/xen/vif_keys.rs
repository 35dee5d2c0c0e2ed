//! Keys of a vif that the toolstack writes.

use ringfence_net::vif::values::parse_mac;
use ringfence_switch::forwarding::Mac;
use ringfence_wire::decimal;
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

/// Key in the backend's directory: bridge that the guest's configuration names.
const BRIDGE: &str = "bridge";
/// Key in the backend's directory: script that connects the interface.
const SCRIPT: &str = "script";
/// Script with which the daemon connects the interface.
const OUR_SCRIPT: &str = "vif-ringfence";

/// Returns `true` if the toolstack's script, which may have a path, is the one called `name`.
pub(super) fn is_script(script: &str, name: &str) -> bool {
    script.rsplit('/').next() == Some(name)
}

/// Keys of a vif in the backend's directory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct VifKeys {
    pub(super) mac: Option<Mac>,
    pub(super) mtu: Option<u16>,
    pub(super) bridge: Option<String>,
    pub(super) domain_name: Option<String>,
    /// Script of the toolstack's, with its path.
    pub(super) script: Option<String>,
}

impl VifKeys {
    /// Reads the keys. Uses only the backend's directory, because the guest can write to the other one.
    pub(super) fn read(store: &mut StoreClient, device: &DeviceId) -> Result<VifKeys, StoreError> {
        let back = device.backend_path();
        let mut read = |key: &str| store.read_opt(&format!("{back}/{key}"));
        let mac = read(keys::MAC)?.and_then(|text| parse_mac(&text).ok());
        let mtu = read(keys::MTU)?.and_then(|text| decimal::parse_u16(&text).ok());
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).ok().filter(|text| !text.is_empty());
        let bridge = read(BRIDGE)?.and_then(text);
        let script = read(SCRIPT)?.and_then(text);
        let name = store.read_opt(&format!("/local/domain/{}/name", device.frontend));
        // A driver domain may have no right to read the name.
        let domain_name = match name {
            Ok(name) => name.and_then(text),
            Err(StoreError::Refused { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(VifKeys { mac, mtu, bridge, domain_name, script })
    }

    /// Returns `true` if the script connects the TAP itself: to a bridge, or by routes. libxl writes the key `bridge` also
    /// for routed interfaces.
    pub(super) fn has_other_script(&self) -> bool {
        self.script.as_deref().is_some_and(|script| !is_script(script, OUR_SCRIPT))
    }
}
