//! An HTTP request before it has a URL and credentials.

use std::collections::BTreeMap;

use bytes::Bytes;
use reqwest::Method;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::a2a::model::{File, FileContent, Part};
use crate::files::StoredFile;
use crate::json;

pub(super) const JSON: &str = "application/json";

#[derive(Debug)]
pub(crate) struct HttpCall {
    pub method: Method,
    /// Path segments below the URL of the interface.
    pub path: Vec<String>,
    pub content_type: &'static str,
    rpc_method: Option<&'static str>,
    params: Option<Box<RawValue>>,
    /// The files whose bytes are read from the store while the body is sent, and what the body has in their place.
    files: Vec<(String, StoredFile)>,
}

impl HttpCall {
    /// A JSON-RPC call to the URL of the interface.
    pub(super) fn rpc(method: &'static str, params: &impl Serialize) -> Self {
        Self {
            method: Method::POST,
            path: Vec::new(),
            content_type: JSON,
            rpc_method: Some(method),
            params: Some(raw(params)),
            files: Vec::new(),
        }
    }

    /// A REST call with a body.
    pub(super) fn post(path: Vec<String>, content_type: &'static str, body: &impl Serialize) -> Self {
        let params = Some(raw(body));
        Self { method: Method::POST, path, content_type, rpc_method: None, params, files: Vec::new() }
    }

    /// A REST call without a body.
    pub(super) fn get(path: Vec<String>, content_type: &'static str) -> Self {
        Self { method: Method::GET, path, content_type, rpc_method: None, params: None, files: Vec::new() }
    }

    /// Takes the files of a message.
    pub(super) fn with_files(mut self, parts: &[Part]) -> Self {
        self.files = parts
            .iter()
            .filter_map(|part| match part {
                Part::File(File { content: FileContent::FromStore(content), .. }) => {
                    Some((content.placeholder().to_owned(), content.file.clone()))
                }
                _ => None,
            })
            .collect();
        self
    }

    pub(crate) fn files(&self) -> &[(String, StoredFile)] {
        &self.files
    }

    /// Sets the tenant: v1.0 has it in the parameters of JSON-RPC, and as the first segment of a
    /// REST path.
    pub(crate) fn for_tenant(mut self, tenant: &str) -> Self {
        if self.rpc_method.is_none() {
            self.path.insert(0, tenant.to_owned());
        } else if let Some(params) = &self.params {
            let fields = serde_json::from_str::<BTreeMap<&str, &RawValue>>(params.get());
            if let Ok(mut fields) = fields {
                let tenant = raw(&tenant);
                fields.insert("tenant", &tenant);
                self.params = Some(raw(&fields));
            }
        }
        self
    }

    /// Changes the media type to `application/json`; false if it is that already.
    pub(crate) fn use_plain_json(&mut self) -> bool {
        std::mem::replace(&mut self.content_type, JSON) != JSON
    }

    /// Changes GET to POST for a subscription, which some agents require; false if this is any other call.
    pub(crate) fn subscribe_with_post(&mut self) -> bool {
        let is_subscribe = self.path.last().is_some_and(|last| last.ends_with(":subscribe"));
        let was_get = is_subscribe && self.method == Method::GET;
        if was_get {
            self.method = Method::POST;
        }
        was_get
    }

    /// The approximate size of the body, in bytes.
    pub(crate) fn size(&self) -> usize {
        self.params.as_ref().map_or(0, |params| params.get().len())
    }

    /// Whether it is a JSON-RPC call, so that its response has an id.
    pub(crate) fn is_rpc(&self) -> bool {
        self.rpc_method.is_some()
    }

    /// The body; a JSON-RPC call has this id.
    pub(crate) fn body(&self, id: uuid::Uuid) -> Option<Bytes> {
        #[derive(Serialize)]
        struct RpcRequest<'a> {
            jsonrpc: &'static str,
            // Some agents require a UUID.
            id: uuid::Uuid,
            method: &'static str,
            params: &'a RawValue,
        }
        let params = self.params.as_ref()?;
        let Some(method) = self.rpc_method else {
            return Some(Bytes::copy_from_slice(params.get().as_bytes()));
        };
        let request = RpcRequest { jsonrpc: "2.0", id, method, params };
        Some(json::to_bytes(&request))
    }
}

pub(super) fn raw(value: &impl Serialize) -> Box<RawValue> {
    to_raw_value(value).expect("strings, lists and raw JSON always serialize")
}
