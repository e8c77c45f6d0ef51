// "Save as PNG": draws the SVG that the link beside the button holds onto a canvas. Nothing is fetched.
(() => {
  const SCALE = 2; // for sharp text on dense screens
  const MAX_HEIGHT = 16000; // px; browsers' canvases end soon after
  const drawn = async (url) => {
    const image = new Image();
    image.src = url;
    await image.decode();
    const scale = Math.min(SCALE, MAX_HEIGHT / image.naturalHeight);
    const canvas = document.createElement('canvas');
    canvas.width = Math.round(scale * image.naturalWidth);
    canvas.height = Math.round(scale * image.naturalHeight);
    canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((done, failed) => {
      canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error('no picture'))), 'image/png');
    });
  };
  document.addEventListener('click', async (event) => {
    const button = event.target.closest?.('button[data-png]');
    if (!button) return;
    try {
      const source = button.parentElement.querySelector("a[href^='data:image/svg']");
      const url = URL.createObjectURL(await drawn(source.href));
      const link = Object.assign(document.createElement('a'), { href: url, download: button.dataset.png });
      link.click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000); // the browser may still read it
    } catch (failure) {
      console.warn(failure);
      button.textContent = button.dataset.failed;
    }
  });
})();
